"""jengine as an engine of Dynamo (ai-dynamo): a worker (worker.py), and what requests and answers become
(requests.py).
"""
