"""jengine as an engine of Dynamo (the extra `dynamo`): a worker (worker.py), and its requests and answers
(requests.py).
"""
