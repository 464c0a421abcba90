"""Clips of video: read, checked, written, shown."""
