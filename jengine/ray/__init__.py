"""jengine on Ray (`pip install 'jengine[ray]'`): Ray Data stages (data.py) and a Ray Serve application (serve.py)."""
