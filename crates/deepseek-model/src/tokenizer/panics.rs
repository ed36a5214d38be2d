//! Panics of the library, as errors.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::error::cut;

thread_local! {
    /// Whether this thread is in a call whose panic becomes an error.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread, now, would become a [`TokenizerError`](super::TokenizerError).
///
/// The panic hook runs before that, and by default it writes to the standard error stream. The hook
/// belongs to the program, so this crate leaves it alone; a program that shows the error asks this in
/// a hook of its own, and shows no other text:
///
/// ```
/// let show = std::panic::take_hook();
/// std::panic::set_hook(Box::new(move |panic| {
///     if !deepseek_model::tokenizer::catches_panics() {
///         show(panic);
///     }
/// }));
/// ```
pub fn catches_panics() -> bool {
    // A thread that ends may panic where its variables are gone; then nothing is caught.
    CATCHING.try_with(Cell::get).unwrap_or(false)
}

/// What the library returns, or why it failed: it answers some steps with a panic, such as a `Replace` of
/// an expression that takes no character.
pub(super) fn caught<T, E: ToString>(action: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    let before = CATCHING.replace(true);
    // Nothing of ours is changed in there, so nothing is left half done.
    let result = catch_unwind(AssertUnwindSafe(action));
    CATCHING.set(before);
    match result {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("it panicked: {}", cut(text.unwrap_or("?"))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hook that hid the panic of another thread, or a later one of this, would hide a fault.
    #[test]
    fn only_a_panic_that_becomes_an_error_is_told_apart() {
        assert!(!catches_panics());
        let (here, there) = caught(|| {
            let there = std::thread::spawn(catches_panics).join();
            let nested = caught(|| Ok::<_, String>(catches_panics()));
            Ok::<_, String>((nested == Ok(true) && catches_panics(), there.unwrap()))
        })
        .unwrap();
        assert_eq!((here, there), (true, false));

        let failed: Result<(), String> = caught(|| -> Result<(), String> { panic!("no base64") });
        assert_eq!(failed.unwrap_err(), "it panicked: no base64");
        assert!(!catches_panics());
    }
}
