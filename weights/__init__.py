"""The shipped checkpoints. See README.md in this folder."""
