"""How well a model predicts text: perplexity, bits per byte, and the tasks of lm-evaluation-harness."""
