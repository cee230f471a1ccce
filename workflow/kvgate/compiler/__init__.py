"""rknn-toolkit2 in a process of its own: what goes in, what it says, what comes out, calibration."""
