//! Panics of the library, as errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::error::cut;

/// What the library returns, or why it failed: it answers some damaged files with a panic, such as a
/// `Precompiled` normalizer that is no base64.
pub(super) fn caught<T, E: ToString>(action: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    // Nothing of ours is changed in there, so nothing is left half done.
    match catch_unwind(AssertUnwindSafe(action)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("it panicked: {}", cut(text.unwrap_or("?"))))
        }
    }
}
