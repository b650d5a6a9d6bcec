"""Runs the scheduler with a cost model and a virtual clock, to predict how an engine serves a trace, without
a device.
"""
