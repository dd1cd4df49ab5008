"""Evaluation of math reasoning: data sets, prompts, sampling, metrics and reports (`trl-grpo-plus eval`)."""
