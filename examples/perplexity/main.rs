//! Generates text.
fn main() {}
