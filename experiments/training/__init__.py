"""Training of the small shipped checkpoint: trunk and MTP head jointly, then the head alone by distillation."""
