"""The playground: a page that chats with the model and shows its engine live, on the metrics port."""
