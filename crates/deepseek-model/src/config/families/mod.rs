//! Keys by which other families of models ask for another computation, each with the value that asks
//! for what is computed here.

mod attention;
mod experts;
mod layers;
mod rotation;

use super::neutral::Neutral;

/// A value, what is computed here, and the keys whose other values ask for something else.
type Key = (Neutral, &'static str, &'static [&'static str]);

/// All such keys, by what they are about.
pub(super) const KEYS: [&[Key]; 4] = [experts::KEYS, layers::KEYS, attention::KEYS, rotation::KEYS];
