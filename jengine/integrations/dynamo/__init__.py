"""jengine as an engine of Dynamo (the extra `dynamo`): a worker, and its requests and answers."""
