"""What is remembered of each prompt, and how finished answers reach the engine that drafts from them."""
