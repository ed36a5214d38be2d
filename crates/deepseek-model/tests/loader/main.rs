//! Loading checkpoints: the values of every storage format, and every way to refuse one.

mod checkpoint;
mod fixtures;
mod formats;
mod reference;
mod refused;
mod unread;
