//! Whether the host has memory for what is about to be allocated. It ends a program that takes more,
//! so whoever takes much asks first.

use std::{fmt, fs};

use super::Bytes;

/// Memory that cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes that the system has left, swap included; `None` if it refused though it has more left, as it
    /// does under a limit on the address space, or does not say.
    pub available: Option<u64>,
}

impl Shortage {
    /// Of what cannot even be counted.
    pub(crate) const UNKNOWN: Self = Self { available: None };
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.available {
            Some(bytes) => write!(
                f,
                "expected at most the {} that are available",
                Bytes(bytes)
            ),
            None => f.write_str(
                "expected no more than the system gives this process (a limit on its addresses, ulimit \
                 -v, may be the reason)",
            ),
        }
    }
}

/// Bytes that the allocator must have beyond those that are asked for: a step that nobody asks for,
/// being small, and everything that is not counted. Without them a program would be told that it has
/// room, and be ended by the next small allocation.
const BESIDE: u64 = 32 << 20;

/// Refuses what the allocator does not give, or what is more than the system has left. What others
/// take in the meantime is not foreseen, nor a limit that a control group above ours sets.
pub(crate) fn check(bytes: u64) -> Result<(), Shortage> {
    let with_rest = usize::try_from(bytes.saturating_add(BESIDE));
    let reserved = with_rest.is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    within(bytes, available())?;
    if reserved {
        Ok(())
    } else {
        Err(Shortage { available: None })
    }
}

/// What the first step leaves behind: buffers of threads and libraries, which none of them gives back. On two
/// threads 4 MiB of it were seen.
const LEFT_BEHIND: u64 = 8 << 20;

/// Whether so much fits and still will when it is tried in another run, and behind other work in it: an
/// eighth more, since runs differ, and what work leaves behind.
pub(crate) fn fits(bytes: u64) -> bool {
    check(bytes.saturating_add(bytes / 8).saturating_add(LEFT_BEHIND)).is_ok()
}

fn within(bytes: u64, available: Option<u64>) -> Result<(), Shortage> {
    match available {
        Some(left) if left < bytes => Err(Shortage { available }),
        _ => Ok(()),
    }
}

/// Bytes that the system and our control group have left; `None` where neither says (not Linux).
fn available() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok()?;
    let left = field(&system, "MemAvailable:")? << 10;
    let swap = field(&system, "SwapFree:").unwrap_or(0) << 10;
    Some(left.min(group().unwrap_or(u64::MAX)).saturating_add(swap))
}

/// The same of our control group alone, if it has a limit. Its files can be dropped from memory.
fn group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let read = |file| fs::read_to_string(format!("/sys/fs/cgroup{path}/{file}")).ok();
    let number = |file| read(file)?.trim().parse::<u64>().ok();
    let (most, used) = (number("memory.max")?, number("memory.current")?);
    let files = field(&read("memory.stat")?, "file").unwrap_or(0);
    Some(most.saturating_sub(used.saturating_sub(files)))
}

/// The number after a name, the two separated by blanks.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let value = (words.next() == Some(name)).then(|| words.next())?;
        value?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_is_left_is_refused() {
        assert_eq!(within(5, Some(5)), Ok(()));
        let available = Some(4);
        assert_eq!(within(5, available), Err(Shortage { available }));
        assert_eq!(within(5, None), Ok(()));
        check(1).unwrap();
        // Told by what there is, where the system says so, and not by a limit that may not be there.
        let shortage = check(u64::MAX).unwrap_err();
        assert_eq!(shortage.available.is_some(), super::available().is_some());
    }

    /// A number that the system gives is told; without one, what else can be lower than what it has.
    #[test]
    fn a_shortage_says_what_there_is_or_what_may_be_the_reason() {
        let of = |available| Shortage { available }.to_string();
        insta::assert_snapshot!(of(Some(3 << 20)), @"expected at most the 3 MiB that are available");
        insta::assert_snapshot!(of(None), @"expected no more than the system gives this process (a limit on its addresses, ulimit -v, may be the reason)");
    }

    /// A name may begin like another.
    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemFree: 1 kB\nMemAvailable:   23 kB\nfile_mapped 4\nfile 5\n";
        assert_eq!(field(text, "MemAvailable:"), Some(23));
        assert_eq!(field(text, "file"), Some(5));
        assert_eq!(field(text, "Swap:"), None);
        #[cfg(target_os = "linux")]
        assert!(available().unwrap() > 0);
    }
}
