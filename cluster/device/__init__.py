"""Transfers between host and device, staged inputs, device timing, and the function that a step calls to wait for the
device.
"""
