"""What users import: LLM, AsyncLLM, prompts, chats, embeddings, outputs."""
