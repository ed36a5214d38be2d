//! The moduli of the hash columns.

use std::collections::HashSet;

/// Hands out primes, each at most once.
///
/// One pool serves all layers of a model, so that no two columns anywhere share a modulus and a
/// collision in one column says nothing about the others.
#[derive(Debug, Default)]
pub(super) struct PrimePool {
    used: HashSet<u64>,
    /// Where the last search started and ended: no prime between is left.
    searched: (u64, u64),
}

impl PrimePool {
    /// The smallest prime from `start` on that was not handed out before.
    pub(super) fn take(&mut self, start: u64) -> u64 {
        let (from, end) = self.searched;
        // All columns of a model start at one size: each search goes on where the last ended.
        let resumed = if start == from { end.max(start) } else { start };
        let mut prime = resumed;
        while !is_prime(prime) || self.used.contains(&prime) {
            prime += 1;
        }
        self.used.insert(prime);
        self.searched = (start, prime + 1);
        prime
    }
}

/// Trial division: the numbers are table sizes, 16 million in the release, whose root is 4,000.
fn is_prime(n: u64) -> bool {
    if n < 4 {
        return n > 1;
    }
    n % 2 == 1
        && (3..)
            .step_by(2)
            .take_while(|d| d * d <= n)
            .all(|d| !n.is_multiple_of(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primality_of_small_numbers() {
        let primes: Vec<u64> = (0..60).filter(|n| is_prime(*n)).collect();
        assert_eq!(
            primes,
            [
                2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59
            ]
        );
    }

    #[test]
    fn a_prime_is_handed_out_once() {
        let mut pool = PrimePool::default();
        let mut take =
            |start, count| -> Vec<u64> { (0..count).map(|_| pool.take(start)).collect() };
        assert_eq!(take(10, 3), [11, 13, 17]);
        assert_eq!(take(10, 2), [19, 23]);
        assert_eq!(take(2, 5), [2, 3, 5, 7, 29]);
        assert_eq!(take(10, 1), [31]);
    }
}
