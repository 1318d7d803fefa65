"""SGLang processes of one cell. Tokens in, tokens out."""
