"""Tests of the endpoint that programs call."""
