"""Files that ship with the package: the clip of `coanerv demo`."""
