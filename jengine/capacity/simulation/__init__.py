"""Predicts how an engine serves a trace: its scheduler, a cost model and a virtual clock."""
