"""Client of SGLang servers, router, parser process, and limits of calls."""
