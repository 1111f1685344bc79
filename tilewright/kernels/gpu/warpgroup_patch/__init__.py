"""Convolutions by warpgroups that read a patch of the image once for all taps of the filter (Hopper)."""
