"""`python -m coanerv_codec` is the same as `coanerv`."""

from coanerv_codec.cli import main

if __name__ == "__main__":
    main()
