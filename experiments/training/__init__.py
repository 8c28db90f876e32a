"""Training of the shipped checkpoint: trunk and MTP head together, then the head alone by distillation."""
