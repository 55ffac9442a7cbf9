"""vLLM's classes beside `LLM`: engine arguments, their parser, and the engines that are driven request by request."""
