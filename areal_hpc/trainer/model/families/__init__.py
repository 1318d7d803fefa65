"""Model families: sizes from `config.json`, names of weights, transformers' modules, adapters."""
