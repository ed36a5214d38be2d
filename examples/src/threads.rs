//! How many threads compute.

use std::env::VarError;

use anyhow::{anyhow, bail, ensure};

/// Threads that may compute at most, unless there are [`PER_CORE`] for each core. Threads far beyond
/// the cores wait for one another: on two cores a step of a thousand threads never ends.
const MOST: usize = 256;

/// Threads for each core at most, where that is more.
const PER_CORE: usize = 4;

/// Starts the threads that compute. Left alone, rayon starts as many as it is told, or panics.
pub(crate) fn start() -> anyhow::Result<()> {
    let cores: usize = std::thread::available_parallelism().map_or(1, Into::into);
    check(|name| std::env::var(name), MOST.max(PER_CORE * cores))?;
    // The error's text holds its cause already.
    let started = rayon::ThreadPoolBuilder::new().build_global();
    started.map_err(|error| {
        let flag = "RAYON_NUM_THREADS says how many";
        anyhow!("cannot start the threads that compute ({flag}): {error}")
    })
}

/// Checks the variables that rayon takes the number of threads from. It passes over what is no number
/// without a word, so that the mistake would go unseen.
fn check(variable: impl Fn(&str) -> Result<String, VarError>, most: usize) -> anyhow::Result<()> {
    for name in ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"] {
        let expected = format!("expected a number of threads, 0 (one for each core) to {most}");
        let text = match variable(name) {
            Ok(text) => text,
            Err(VarError::NotPresent) => continue,
            Err(VarError::NotUnicode(bytes)) => {
                bail!("{name}={}: {expected}", bytes.to_string_lossy())
            }
        };
        let fits = text.parse().is_ok_and(|threads: usize| threads <= most);
        ensure!(text.is_empty() || fits, "{name}={text}: {expected}");
    }
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
        for value in ["", "0", "1", "256"] {
            check("RAYON_NUM_THREADS", Ok(value)).unwrap();
        }
        let refuse = |set, value| check(set, value).unwrap_err().to_string();
        insta::assert_snapshot!(refuse("RAYON_NUM_THREADS", Ok("1000000")), @"RAYON_NUM_THREADS=1000000: expected a number of threads, 0 (one for each core) to 256");
        insta::assert_snapshot!(refuse("RAYON_NUM_THREADS", Ok("all")), @"RAYON_NUM_THREADS=all: expected a number of threads, 0 (one for each core) to 256");
        insta::assert_snapshot!(refuse("RAYON_RS_NUM_CPUS", Ok("257")), @"RAYON_RS_NUM_CPUS=257: expected a number of threads, 0 (one for each core) to 256");
        let unreadable = Err(VarError::NotUnicode("4?".into()));
        insta::assert_snapshot!(refuse("RAYON_NUM_THREADS", unreadable), @"RAYON_NUM_THREADS=4?: expected a number of threads, 0 (one for each core) to 256");
    }
}
