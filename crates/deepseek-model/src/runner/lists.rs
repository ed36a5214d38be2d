//! The numbers of a captured step: lists on the device whose addresses never change, written anew
//! before each launch.

use candle_core::{DType, Device, Tensor};

use super::layout::{Layout, Limits, List};
use replay_cuda::PAD_ROW;

use crate::{
    Error, Result,
    cache::{PageLists, PagedRows},
    memory::host,
    ops::DeviceGroups,
    rows::{DeviceRows, Rows},
};

/// All lists, side by side in one tensor, so that one copy writes them.
#[derive(Debug)]
pub(super) struct StepLists {
    layout: Layout,
    host: Vec<u32>,
    on_device: Tensor,
}

impl StepLists {
    /// Lists that are all padding.
    ///
    /// # Errors
    /// [`Error::GraphLists`] if the host has no memory for them, or the device has none. A list of
    /// pages for each of many sequences is larger than the pages are.
    pub(super) fn new(layout: Layout, device: &Device) -> Result<Self> {
        // There is a second copy on its way to the device.
        let bytes = layout.bytes().saturating_mul(2);
        host::check(bytes).map_err(|shortage| Error::GraphLists {
            bytes,
            requests: layout.limits.requests,
            tokens: layout.limits.tokens,
            shortage,
        })?;
        let mut lists = Self {
            on_device: Tensor::zeros(layout.len, DType::U32, device)?,
            host: vec![0; layout.len],
            layout,
        };
        lists.clear()?;
        Ok(lists)
    }

    /// Bytes of the lists on the device.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.on_device.elem_count() * size_of::<u32>()
    }

    /// Rows that the lists hold.
    pub(super) fn most_rows(&self) -> usize {
        self.layout.limits.rows
    }

    /// Requests that the lists hold.
    pub(super) fn most_requests(&self) -> usize {
        self.layout.limits.requests
    }

    /// Makes every row a pad row, which writes nowhere and reads nothing.
    pub(super) fn clear(&mut self) -> Result<()> {
        self.pad();
        self.upload()
    }

    /// Writes a step, or the rows that are kept of one: `tokens` are those of `rows`, `kv_starts` the
    /// KV bounds of the layers before the cut and of each replay layer, by request. Lists that these are without take none.
    pub(super) fn write(
        &mut self,
        tokens: &[u32],
        rows: &Rows,
        pages: &PageLists<'_>,
        kv_starts: &[&[u32]],
    ) -> Result<()> {
        self.pad();
        self.put(List::Tokens, 0, tokens.iter().copied());
        for (layer, starts) in kv_starts.iter().enumerate() {
            self.put(List::KvStart(layer), 0, starts.iter().copied());
        }
        let width = self.layout.limits.pages();
        let takes_pages = self.layout.places.contains_key(&List::Pages);
        for (request, span) in rows.spans().iter().enumerate() {
            let numbers = [span.slot, span.first_row, span.first_pos, span.len];
            self.put(List::Spans, request * 4, numbers.map(|x| x as u32));
            if takes_pages {
                // Of what was found in the cache there may be more than any row of the step sees.
                let list = pages.of(request).iter().copied().take(width);
                self.put(List::Pages, request * width, list);
            }
            self.put(List::Positions, span.first_row, span.positions());
            let requests = std::iter::repeat_n(request as u32, span.len);
            self.put(List::Requests, span.first_row, requests);
            for capacity in self.layout.capacities.clone() {
                let places = span.ring_rows(capacity);
                self.put(List::Ring(capacity), span.first_row, places);
            }
        }
        for ratio in self.layout.ratios.clone() {
            self.write_groups(ratio, rows, pages);
        }
        self.upload()
    }

    fn write_groups(&mut self, ratio: usize, rows: &Rows, pages: &PageLists<'_>) {
        let per_page = self.layout.limits.page_tokens / ratio;
        for (at, (request, entry)) in rows.closed_groups(ratio).enumerate() {
            let is_there = (entry + 1) * ratio <= rows.spans()[request].shared;
            let pool_row = if is_there {
                PAD_ROW
            } else {
                PagedRows::place(per_page, pages.of(request), entry) as u32
            };
            self.put(List::Groups(ratio), at * 2, [request as u32, entry as u32]);
            self.put(List::GroupPositions(ratio), at, [(entry * ratio) as u32]);
            self.put(List::PoolRows(ratio), at, [pool_row]);
        }
    }

    fn pad(&mut self) {
        for (list, (start, len)) in &self.layout.places {
            self.host[*start..start + len].fill(list.padding());
        }
    }

    /// Writes values from place `at` of a list on.
    ///
    /// # Panics
    /// If the list does not hold them.
    fn put(&mut self, list: List, at: usize, values: impl IntoIterator<Item = u32>) {
        let mut values = values.into_iter().peekable();
        if values.peek().is_none() {
            return;
        }
        let (start, len) = self.layout.places[&list];
        let mut places = self.host[start..start + len][at..].iter_mut();
        for value in values {
            *places.next().expect("a list holds the largest step") = value;
        }
    }

    fn upload(&self) -> Result<()> {
        let staged = Tensor::new(self.host.as_slice(), self.on_device.device())?;
        Ok(self.on_device.slice_set(&staged, 0, 0)?)
    }

    /// The first `len` numbers of a list.
    fn view(&self, list: List, len: usize) -> Result<Tensor> {
        Ok(self.on_device.narrow(0, self.layout.places[&list].0, len)?)
    }

    /// Token ids `[rows]`.
    pub(super) fn tokens(&self, rows: usize) -> Result<Tensor> {
        self.view(List::Tokens, rows)
    }

    /// The pages of the first `requests` requests.
    pub(super) fn pages(&self, requests: usize) -> Result<PageLists<'static>> {
        let width = self.layout.limits.pages();
        let table = self.view(List::Pages, requests * width)?;
        Ok(PageLists::fixed(table.reshape((requests, width))?))
    }

    /// The first position whose window KV each request may read, `[requests]`: in the layers before
    /// the cut at 0, in replay layer `i` at `i + 1`.
    pub(super) fn kv_start(&self, layer: usize, requests: usize) -> Result<Tensor> {
        self.view(List::KvStart(layer), requests)
    }

    /// The first `n` rows, of `requests` requests.
    pub(super) fn rows(&self, n: usize, requests: usize) -> Result<Rows> {
        let spans = self.view(List::Spans, requests * 4)?;
        let device_rows = DeviceRows {
            positions: self.view(List::Positions, n)?,
            requests: self.view(List::Requests, n)?,
            spans: spans.reshape((requests, 4))?,
        };
        let rings = self.layout.capacities.iter();
        let rings = rings.map(|&c| Ok((c, self.view(List::Ring(c), n)?)));
        let groups = self.layout.ratios.iter().map(|&ratio| {
            let count = Limits::groups(n, requests, ratio);
            let entries = self.view(List::Groups(ratio), count * 2)?;
            let groups = DeviceGroups {
                entries: entries.reshape((count, 2))?,
                positions: self.view(List::GroupPositions(ratio), count)?,
                pool_rows: Some(self.view(List::PoolRows(ratio), count)?),
            };
            Ok((ratio, groups))
        });
        Ok(Rows::fixed(
            self.on_device.device(),
            (n, self.layout.limits.tokens),
            device_rows,
            rings.collect::<Result<_>>()?,
            groups.collect::<Result<_>>()?,
        ))
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::Config;

    fn config() -> Config {
        Config::load("tests/data/bf16-s1".as_ref()).unwrap()
    }

    /// What a captured step reads is what an eager one uploads, and padding after it.
    #[test]
    fn lists_are_those_of_the_rows_and_padding() {
        let (config, device) = (config(), Device::Cpu);
        let limits = Limits {
            rows: 8,
            requests: 4,
            tokens: 512,
            page_tokens: 128,
        };
        let layout = Layout::of_steps(&config, limits, 2);
        let mut lists = StepLists::new(layout, &device).unwrap();
        let rows = Rows::pack(&device, [(2, 129, 1), (0, 6, 3), (1, 8, 1)]);
        let pages: [&[u32]; 3] = [&[4, 9], &[7], &[1]];
        lists
            .write(
                &[5, 6, 7, 8, 9],
                &rows,
                &PageLists::new(pages),
                &[&[0, 2, 0], &[0, 0, 0], &[70, 0, 3]],
            )
            .unwrap();
        let list = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let none = u32::MAX;
        assert_eq!(list(&lists.tokens(8).unwrap()), [5, 6, 7, 8, 9, 0, 0, 0]);
        let fixed = lists.rows(8, 4).unwrap();
        let (got, want) = (fixed.on_device().unwrap(), rows.on_device().unwrap());
        let padded = |mut list: Vec<u32>, len: usize, pad: u32| {
            list.resize(len, pad);
            list
        };
        assert_eq!(list(&got.positions), padded(list(&want.positions), 8, 0));
        assert_eq!(list(&got.requests), padded(list(&want.requests), 8, none));
        assert_eq!(list(&got.spans), padded(list(&want.spans), 16, 0));
        let table = lists.pages(4).unwrap();
        let table = list(table.on_device(&device).unwrap());
        assert_eq!(&table[..8], [4, 9, none, none, 7, none, none, none]);
        for capacity in [config.sliding_window, 2] {
            let want = list(&rows.ring_rows(capacity).unwrap());
            let got = list(&fixed.ring_rows(capacity).unwrap());
            assert_eq!(got, padded(want, 8, PAD_ROW), "{capacity}");
        }
        let starts = |layer| list(&lists.kv_start(layer, 4).unwrap());
        assert_eq!([starts(0), starts(1)], [[0, 2, 0, 0], [0; 4]]);
        assert_eq!(starts(2), [70, 0, 3, 0]);
        let groups = fixed.fixed_groups(2).unwrap();
        // Position 129 closes entry 64, on the second page; 6 to 8 close entry 3.
        assert_eq!(&list(&groups.entries)[..6], [0, 64, 1, 3, none, none]);
        assert_eq!(&list(&groups.positions)[..3], [128, 6, 0]);
        let pool_rows = list(groups.pool_rows.as_ref().unwrap());
        assert_eq!(&pool_rows[..3], [9 * 64, 7 * 64 + 3, PAD_ROW]);
        lists.clear().unwrap();
        assert_eq!(list(&lists.tokens(8).unwrap()), [0; 8]);
        assert_eq!(list(&lists.kv_start(2, 4).unwrap()), [0; 4]);
    }

    /// Rows that a break keeps: no tokens, no pages, no groups; only the window's ring.
    #[test]
    fn lists_of_kept_rows() {
        let (config, device) = (config(), Device::Cpu);
        let limits = Limits {
            rows: 6,
            requests: 3,
            tokens: 512,
            page_tokens: 128,
        };
        let layout = Layout::of_kept_rows(&config, limits);
        let mut lists = StepLists::new(layout, &device).unwrap();
        let rows = Rows::pack(&device, [(1, 30, 2), (0, 9, 0), (2, 64, 1)]);
        lists.write(&[], &rows, &PageLists::new([]), &[]).unwrap();
        let fixed = lists.rows(4, 3).unwrap();
        let list = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let got = fixed.on_device().unwrap();
        assert_eq!(list(&got.positions), [30, 31, 64, 0]);
        assert_eq!(list(&got.requests), [0, 0, 2, u32::MAX]);
        assert_eq!(list(&got.spans), [1, 0, 30, 2, 0, 2, 9, 0, 2, 2, 64, 1]);
        let w = config.sliding_window as u32;
        let ring = list(&fixed.ring_rows(config.sliding_window).unwrap());
        assert_eq!(ring, [w + 30 % w, w + 31 % w, 2 * w + 64 % w, PAD_ROW]);
        assert!(fixed.fixed_groups(2).is_none());
        assert_eq!(fixed.most_entries(4), 128);
    }

    /// A table of pages for each of a million sequences of a million tokens is refused in numbers, as
    /// is one that cannot be counted.
    #[test]
    fn lists_that_no_host_holds_are_refused() {
        let refuse = |requests, tokens| {
            let limits = Limits {
                rows: 1 << 20,
                requests,
                tokens,
                page_tokens: 128,
            };
            let layout = Layout::of_steps(&config(), limits, 2);
            StepLists::new(layout, &Device::Cpu).unwrap_err()
        };
        for (requests, tokens) in [(1 << 40, 1 << 20), (usize::MAX, usize::MAX)] {
            let refused = refuse(requests, tokens);
            let text = refused.to_string();
            assert!(
                matches!(refused, Error::GraphLists { requests: of, .. } if of == requests),
                "{text}"
            );
            assert!(text.contains("B of lists"), "{text}");
        }
    }
}
