"""Parts of `bench quality`: a checkpoint of full precision from a GGUF file, the texts, and their log-probabilities."""
