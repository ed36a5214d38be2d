//! How many threads compute.

use std::env::VarError;
use std::sync::Mutex;
use std::thread::Builder;

use anyhow::{Context, anyhow, bail, ensure};
use deepseek_model::memory::Bytes;

use crate::count;

/// Threads that may compute at most, unless there are [`PER_CORE`] for each core. Threads far beyond
/// the cores wait for one another: on two cores a step of a thousand threads never ends.
const MOST: usize = 256;

/// Threads for each core at most, where that is more.
const PER_CORE: usize = 4;

/// Starts the threads that compute. Left alone, rayon starts as many as it is told, or panics.
pub(crate) fn start() -> anyhow::Result<()> {
    let cores: usize = std::thread::available_parallelism().map_or(1, Into::into);
    let asked = check(|name| std::env::var(name), MOST.max(PER_CORE * cores))?;
    room(asked.unwrap_or(cores))?;
    // The error's text holds its cause already.
    let started = rayon::ThreadPoolBuilder::new().build_global();
    started.map_err(|error| {
        let flag = "RAYON_NUM_THREADS says how many";
        anyhow!("cannot start the threads that compute ({flag}): {error}")
    })
}

/// Checks the variables that rayon takes the number of threads from. It passes over what is no number
/// without a word, so that the mistake would go unseen.
///
/// Returns the number that is asked for, if one is.
fn check(
    variable: impl Fn(&str) -> Result<String, VarError>,
    most: usize,
) -> anyhow::Result<Option<usize>> {
    let mut asked = None;
    for name in ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"] {
        let expected = format!("expected a number of threads, 0 (one for each core) to {most}");
        let text = match variable(name) {
            Ok(text) => text,
            Err(VarError::NotPresent) => continue,
            Err(VarError::NotUnicode(bytes)) => {
                bail!("{name}={}: {expected}", bytes.to_string_lossy())
            }
        };
        let number = text.parse().ok().filter(|&threads: &usize| threads <= most);
        ensure!(
            text.is_empty() || number.is_some(),
            "{name}={text}: {expected}"
        );
        // Of two that are set rayon takes the first.
        asked = asked.or(number.filter(|&threads| threads > 0));
    }
    Ok(asked)
}

/// Whether as many threads more can be started. Where one cannot, libraries panic, or leave work lying that
/// nobody does.
///
/// # Errors
/// What the system says to the first that it does not start.
pub(crate) fn check_more(threads: usize) -> anyhow::Result<()> {
    let gate = Mutex::new(());
    let started = std::thread::scope(|scope| {
        // All are there at the same time, until this is dropped.
        let _closed = gate.lock();
        (0..threads).try_for_each(|_| {
            let thread = Builder::new().spawn_scoped(scope, || drop(gate.lock()));
            thread.map(|_| ())
        })
    });
    started.with_context(|| {
        format!(
            "cannot start {} beside those that run: raise the limit on them (ulimit -u), or lower \
             RAYON_NUM_THREADS",
            count(threads, "thread")
        )
    })
}

/// Bytes that a program takes before it asks for any: its tokenizer and configuration.
const TO_BEGIN: usize = 16 << 20;

/// Bytes of addresses that a thread takes: the stack that the standard library gives it, and what it
/// allocates to start.
const PER_THREAD: usize = 3 << 20;

/// Refuses to begin where the allocator would soon end the program without a word of what it lacked.
fn room(threads: usize) -> anyhow::Result<()> {
    let bytes = TO_BEGIN + threads * PER_THREAD;
    ensure!(
        Vec::<u8>::new().try_reserve_exact(bytes).is_ok(),
        "cannot allocate the {} that {} and a beginning take: raise the limit on memory (ulimit -v), or \
         lower RAYON_NUM_THREADS",
        Bytes(bytes as u64),
        count(threads, "thread")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_numbers_of_threads_are_refused() {
        let check = |set: &str, value: Result<&str, VarError>| {
            let value = value.map(str::to_owned);
            let variable = |name: &str| {
                let other = Err(VarError::NotPresent);
                if name == set { value.clone() } else { other }
            };
            check(variable, 256)
        };
        for (value, asked) in [("", None), ("0", None), ("1", Some(1)), ("256", Some(256))] {
            assert_eq!(check("RAYON_NUM_THREADS", Ok(value)).unwrap(), asked);
        }
        let refuse = |set, value| check(set, value).unwrap_err().to_string();
        insta::assert_snapshot!(refuse("RAYON_NUM_THREADS", Ok("1000000")), @"RAYON_NUM_THREADS=1000000: expected a number of threads, 0 (one for each core) to 256");
        insta::assert_snapshot!(refuse("RAYON_NUM_THREADS", Ok("all")), @"RAYON_NUM_THREADS=all: expected a number of threads, 0 (one for each core) to 256");
        insta::assert_snapshot!(refuse("RAYON_RS_NUM_CPUS", Ok("257")), @"RAYON_RS_NUM_CPUS=257: expected a number of threads, 0 (one for each core) to 256");
        let unreadable = Err(VarError::NotUnicode("4?".into()));
        insta::assert_snapshot!(refuse("RAYON_NUM_THREADS", unreadable), @"RAYON_NUM_THREADS=4?: expected a number of threads, 0 (one for each core) to 256");
    }
}
