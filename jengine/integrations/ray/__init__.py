"""jengine on Ray (the extra `ray`): Ray Data stages (data.py) and a Ray Serve application (serve.py)."""
