//! Addresses that the allocator reserves for threads, and those that it keeps.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) use glibc::bound;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) use other::bound;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    use std::fs;

    /// What is as large as this is a mapping of its own, which is given back as a whole. It is where glibc
    /// begins, too; above it, tensors of a step with few channels would stay.
    const MAPPED: libc::c_int = 128 << 10;

    /// Where addresses are limited (`ulimit -v`), keeps glibc from reserving some for each thread, and from
    /// keeping what was given back. To be called before there are any threads.
    ///
    /// A thread gets an arena of its own, of 64 MiB that it may never use, if that can be had: what
    /// weights need is then missing under a higher limit and not under a lower one, where no arena was
    /// made. One arena for all costs threads that allocate at once some waiting.
    ///
    /// And by itself it takes the size of what was given back for one that is wanted again, up to 32 MiB,
    /// and keeps such room in pieces that are no room for anything larger. After a step there was then less
    /// than before it, by as much as chance left: the next one was refused, though it is no larger.
    pub(crate) fn bound() {
        let limits = fs::read_to_string("/proc/self/limits");
        if limits.is_ok_and(|limits| is_limited(&limits)) {
            // SAFETY: takes two numbers and has no precondition. That it fails changes nothing.
            unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
            // SAFETY: as above.
            unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED) };
        }
    }

    /// Whether the soft limit on addresses is a number.
    fn is_limited(limits: &str) -> bool {
        let mut lines = limits.lines();
        let limit = lines.find_map(|line| line.strip_prefix("Max address space"));
        let soft = limit.and_then(|limit| limit.split_whitespace().next());
        soft.is_some_and(|soft| soft != "unlimited")
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_soft_limit_counts() {
            let limits = |soft: &str| {
                format!(
                    "Limit                     Soft Limit           Hard Limit           Units     \n\
                     Max cpu time              1                    unlimited            seconds   \n\
                     Max address space         {soft:<20} unlimited            bytes     \n"
                )
            };
            assert!(is_limited(&limits("1073741824")));
            assert!(!is_limited(&limits("unlimited")));
            assert!(!is_limited(""));
            let own = fs::read_to_string("/proc/self/limits").unwrap();
            assert!(own.contains("\nMax address space "), "{own}");
        }
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
mod other {
    /// Nothing is known of other allocators.
    pub(crate) fn bound() {}
}
