//! The numerical operations of the model.
