//! What the example programs share.
