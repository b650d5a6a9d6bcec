"""The scheduler over a cost model and a virtual clock: what an engine would do with a trace, without a device."""
