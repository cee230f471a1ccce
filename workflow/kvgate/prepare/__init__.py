"""The model measured and changed into the one that is exported: attention, norms, rotary embedding, bases. torch."""
