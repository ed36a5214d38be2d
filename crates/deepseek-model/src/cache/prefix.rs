//! Which pages hold the entries of which text, so that a text that begins alike finds them again.
//!
//! A page is known by all tokens from the start of the text to its own last one: it is a node of
//! a tree, under the page before it. Tokens are compared, not hashed, so that no text is ever given
//! the entries of another.

use std::collections::{BTreeMap, HashMap};

/// The page before one in its text; the first page of a text stands under what else its entries depend
/// on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Parent {
    /// Whatever beside the tokens changes the entries: texts of different salts share nothing.
    Salt(u64),
    Page(u32),
}

/// A page whose tokens are known.
#[derive(Debug)]
struct Node {
    parent: Parent,
    tokens: Box<[u32]>,
    /// Pages that go on from this one.
    children: usize,
    /// Sequences that read it.
    holders: usize,
    /// When the last of them let go; a later one is greater.
    idle_since: u64,
}

/// Full pages by their texts. Pages that no sequence holds stay known until their room is wanted.
#[derive(Debug, Default)]
pub(crate) struct PrefixIndex {
    nodes: HashMap<u32, Node>,
    pages: HashMap<(Parent, Box<[u32]>), u32>,
    /// Pages that nobody holds, the longest idle first. A page is let go after those that go on from
    /// it, so the first one never has children.
    idle: BTreeMap<u64, u32>,
    clock: u64,
}

impl PrefixIndex {
    /// The pages that a text begins with, as many as are known.
    pub(crate) fn find(&self, salt: u64, tokens: &[u32], page_tokens: usize) -> Vec<u32> {
        let mut parent = Parent::Salt(salt);
        let mut found = Vec::new();
        for tokens in tokens.chunks_exact(page_tokens) {
            let Some(&page) = self.pages.get(&(parent, tokens.into())) else {
                break;
            };
            found.push(page);
            parent = Parent::Page(page);
        }
        found
    }

    /// Lets one more sequence read pages that [`Self::find`] found.
    pub(crate) fn hold(&mut self, pages: &[u32]) {
        for page in pages {
            let node = self.nodes.get_mut(page).expect("a known page");
            if node.holders == 0 {
                self.idle.remove(&node.idle_since);
            }
            node.holders += 1;
        }
    }

    /// Makes a page known that one sequence holds, behind a page that it holds as well. If another
    /// page has the same text, nothing changes: the other page is given.
    pub(crate) fn publish(&mut self, parent: Parent, tokens: &[u32], page: u32) -> Result<(), u32> {
        let key = (parent, Box::from(tokens));
        if let Some(&known) = self.pages.get(&key) {
            return Err(known);
        }
        if let Parent::Page(parent) = parent {
            let node = self.nodes.get_mut(&parent);
            node.expect("held by the same sequence").children += 1;
        }
        let node = Node {
            parent,
            tokens: key.1.clone(),
            children: 0,
            holders: 1,
            idle_since: 0,
        };
        self.nodes.insert(page, node);
        self.pages.insert(key, page);
        Ok(())
    }

    /// One sequence less holds a page; `false` if the page is not known.
    ///
    /// A sequence lets go of its last page first.
    pub(crate) fn release(&mut self, page: u32) -> bool {
        let Some(node) = self.nodes.get_mut(&page) else {
            return false;
        };
        node.holders -= 1;
        if node.holders == 0 {
            self.clock += 1;
            node.idle_since = self.clock;
            self.idle.insert(self.clock, page);
        }
        true
    }

    /// Pages that nobody holds.
    pub(crate) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Forgets the page that was idle longest.
    pub(crate) fn evict(&mut self) -> Option<u32> {
        let (_, page) = self.idle.pop_first()?;
        let node = self.nodes.remove(&page).expect("a known page");
        debug_assert_eq!(node.children, 0, "page {page} is let go after its children");
        if let Parent::Page(parent) = node.parent {
            let parent = self.nodes.get_mut(&parent).expect("held or let go later");
            parent.children -= 1;
        }
        self.pages.remove(&(node.parent, node.tokens));
        Some(page)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE_TOKENS: usize = 2;

    /// What a cache does with its pages, over few texts that share beginnings.
    #[derive(Debug, Clone)]
    enum Op {
        /// A sequence of a text begins, finds what there is and fills the rest.
        Begin { salt: u64, text: Vec<u32> },
        /// The n-th of those that there are ends.
        End(usize),
        /// Room for a page is wanted.
        Evict,
    }

    fn op() -> impl Strategy<Value = Op> {
        let text = prop::collection::vec(0u32..2, 0..9);
        prop_oneof![
            3 => (0u64..2, text).prop_map(|(salt, text)| Op::Begin { salt, text }),
            2 => any::<usize>().prop_map(Op::End),
            1 => Just(Op::Evict),
        ]
    }

    proptest! {
        /// A page is found by its own text and salt only, is never given away while it is held, and
        /// is known, held alone or free: none is lost and none is two things at once.
        #[test]
        fn pages_are_found_by_their_text_and_never_lost(ops in prop::collection::vec(op(), 0..60)) {
            let mut index = PrefixIndex::default();
            let mut written: HashMap<u32, (u64, Vec<u32>)> = HashMap::new();
            let (mut free, mut next): (Vec<u32>, u32) = (Vec::new(), 0);
            let mut live: Vec<Vec<u32>> = Vec::new();
            for op in ops {
                match op {
                    Op::Begin { salt, text } => {
                        let mut pages = index.find(salt, &text, PAGE_TOKENS);
                        for (i, page) in pages.iter().enumerate() {
                            let upto = text[..(i + 1) * PAGE_TOKENS].to_vec();
                            prop_assert_eq!(&written[page], &(salt, upto));
                        }
                        index.hold(&pages);
                        let mut parent = pages.last().map_or(Parent::Salt(salt), |&p| Parent::Page(p));
                        for end in (pages.len() + 1)..=text.len() / PAGE_TOKENS {
                            let page = free.pop().unwrap_or_else(|| {
                                next += 1;
                                next
                            });
                            prop_assert!(!live.iter().flatten().any(|held| *held == page));
                            let upto = text[..end * PAGE_TOKENS].to_vec();
                            let own = &upto[(end - 1) * PAGE_TOKENS..];
                            let page = match index.publish(parent, own, page) {
                                Ok(()) => page,
                                Err(known) => {
                                    index.hold(&[known]);
                                    free.push(page);
                                    known
                                }
                            };
                            parent = Parent::Page(page);
                            written.insert(page, (salt, upto));
                            pages.push(page);
                        }
                        live.push(pages);
                    }
                    Op::End(n) if !live.is_empty() => {
                        let pages = live.swap_remove(n % live.len());
                        for page in pages.into_iter().rev() {
                            if !index.release(page) {
                                free.push(page);
                            }
                        }
                    }
                    Op::End(_) => {}
                    Op::Evict => if let Some(page) = index.evict() {
                        prop_assert!(!live.iter().flatten().any(|held| *held == page));
                        free.push(page);
                    },
                }
                let mut held: Vec<u32> = live.iter().flatten().copied().collect();
                held.sort_unstable();
                held.dedup();
                prop_assert_eq!(held.len() + index.idle() + free.len(), next as usize);
            }
        }
    }
}
