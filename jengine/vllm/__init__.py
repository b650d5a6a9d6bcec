"""What jengine makes of vLLM's settings and names, so that users change the import only. Plain data."""
