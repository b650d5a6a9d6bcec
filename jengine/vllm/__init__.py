"""What jengine makes of vLLM's settings and names, so that its users change the import only. Plain data, and
functions of it.
"""
