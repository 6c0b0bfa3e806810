"""What a refit costs a SGLang server, in each of its modes."""
