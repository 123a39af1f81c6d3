"""Transfers between host and device, named lists of integers for the device (staging), device timing, and the function
that a step calls to wait for the device.
"""
