"""Plain data that all parts share: options, requests, outputs and updates."""
