//! From logits to a token id: greedy, temperature, top-k, top-p.
