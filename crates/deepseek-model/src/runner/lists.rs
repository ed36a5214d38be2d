//! The numbers of a captured step: lists on the device whose addresses never change, written anew
//! before each launch.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use replay_cuda::PAD_ROW;

use crate::{
    Config,
    cache::{PageLists, PagedRows},
    ops::DeviceGroups,
    rows::{DeviceRows, FixedRows, Rows},
};

/// What a list holds, all u32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum List {
    /// `[rows]`: ids.
    Tokens,
    /// `[rows]`.
    Positions,
    /// `[rows]`.
    Requests,
    /// `[requests, 4]`.
    Spans,
    /// `[requests, most pages]`.
    Pages,
    /// `[requests]`: all zero.
    KvStart,
    /// `[rows]`, for rings of a capacity.
    Ring(usize),
    /// `[rows, 2]`, of a ratio.
    Groups(usize),
    /// `[rows]`, of a ratio.
    GroupPositions(usize),
    /// `[rows]`, of a ratio.
    PoolRows(usize),
}

impl List {
    /// What stands where there is no row, request or group.
    const fn padding(self) -> u32 {
        match self {
            Self::Tokens
            | Self::Positions
            | Self::Spans
            | Self::KvStart
            | Self::GroupPositions(_) => 0,
            Self::Requests | Self::Pages | Self::Groups(_) => u32::MAX,
            Self::Ring(_) | Self::PoolRows(_) => PAD_ROW,
        }
    }
}

/// How large steps can be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Rows of a step.
    pub(super) rows: usize,
    /// Requests of a step.
    pub(super) requests: usize,
    /// Tokens of a sequence.
    pub(super) tokens: usize,
    /// Tokens of a page.
    pub(super) page_tokens: usize,
}

impl Limits {
    fn pages(self) -> usize {
        self.tokens.div_ceil(self.page_tokens)
    }
}

/// All lists, side by side in one tensor, so that one copy writes them.
#[derive(Debug)]
pub(super) struct StepLists {
    limits: Limits,
    /// Ratios of the KV sources, each once.
    ratios: Vec<usize>,
    /// Capacities of the rings, each once.
    capacities: Vec<usize>,
    /// Where each list begins, and how long it is.
    places: HashMap<List, (usize, usize)>,
    host: Vec<u32>,
    on_device: Tensor,
}

impl StepLists {
    pub(super) fn new(config: &Config, limits: Limits, device: &Device) -> Result<Self> {
        let sources = config.layers.iter().enumerate();
        let mut ratios: Vec<usize> = sources
            .filter(|(i, layer)| layer.kv_source == Some(*i))
            .map(|(_, layer)| layer.ratio)
            .collect();
        ratios.sort_unstable();
        ratios.dedup();
        let mut capacities = vec![config.sliding_window];
        capacities.extend(ratios.iter().filter(|ratio| **ratio > 1));
        capacities.sort_unstable();
        capacities.dedup();

        let Limits { rows, requests, .. } = limits;
        let mut lists = vec![
            (List::Tokens, rows),
            (List::Positions, rows),
            (List::Requests, rows),
            (List::Spans, requests * 4),
            (List::Pages, requests * limits.pages()),
            (List::KvStart, requests),
        ];
        lists.extend(capacities.iter().map(|&c| (List::Ring(c), rows)));
        for &ratio in &ratios {
            lists.push((List::Groups(ratio), rows * 2));
            lists.push((List::GroupPositions(ratio), rows));
            lists.push((List::PoolRows(ratio), rows));
        }
        let (mut places, mut host) = (HashMap::new(), Vec::new());
        for (list, len) in lists {
            places.insert(list, (host.len(), len));
            host.resize(host.len() + len, list.padding());
        }
        Ok(Self {
            limits,
            ratios,
            capacities,
            places,
            on_device: Tensor::zeros(host.len(), DType::U32, device)?,
            host,
        })
    }

    /// Makes every row a pad row, which writes nowhere and reads nothing.
    pub(super) fn clear(&mut self) -> Result<()> {
        for (list, (start, len)) in &self.places {
            self.host[*start..start + len].fill(list.padding());
        }
        self.upload()
    }

    /// Writes a step of whole requests: `tokens` are those of `rows`.
    pub(super) fn write(
        &mut self,
        tokens: &[u32],
        rows: &Rows,
        pages: &PageLists<'_>,
    ) -> Result<()> {
        for (list, (start, len)) in &self.places {
            self.host[*start..start + len].fill(list.padding());
        }
        let width = self.limits.pages();
        self.put(List::Tokens, tokens.iter().copied());
        for (request, span) in rows.spans().iter().enumerate() {
            let numbers = [span.slot, span.first_row, span.first_pos, span.len];
            self.put_at(List::Spans, request * 4, numbers.map(|x| x as u32));
            let list = pages.of(request).iter().copied();
            self.put_at(List::Pages, request * width, list);
            self.put_at(List::Positions, span.first_row, span.positions());
            let requests = std::iter::repeat_n(request as u32, span.len);
            self.put_at(List::Requests, span.first_row, requests);
            for capacity in self.capacities.clone() {
                self.put_at(
                    List::Ring(capacity),
                    span.first_row,
                    span.ring_rows(capacity),
                );
            }
        }
        for ratio in self.ratios.clone() {
            self.write_groups(ratio, rows, pages);
        }
        self.upload()
    }

    fn write_groups(&mut self, ratio: usize, rows: &Rows, pages: &PageLists<'_>) {
        let per_page = self.limits.page_tokens / ratio;
        for (at, (request, entry)) in rows.closed_groups(ratio).enumerate() {
            let pool_row = PagedRows::place(per_page, pages.of(request), entry);
            self.put_at(List::Groups(ratio), at * 2, [request as u32, entry as u32]);
            self.put_at(List::GroupPositions(ratio), at, [(entry * ratio) as u32]);
            self.put_at(List::PoolRows(ratio), at, [pool_row as u32]);
        }
    }

    fn put(&mut self, list: List, values: impl IntoIterator<Item = u32>) {
        self.put_at(list, 0, values);
    }

    fn put_at(&mut self, list: List, at: usize, values: impl IntoIterator<Item = u32>) {
        let (start, len) = self.places[&list];
        let to = &mut self.host[start..start + len][at..];
        to.iter_mut()
            .zip(values)
            .for_each(|(to, value)| *to = value);
    }

    fn upload(&self) -> Result<()> {
        let staged = Tensor::new(self.host.as_slice(), self.on_device.device())?;
        self.on_device.slice_set(&staged, 0, 0)
    }

    /// The first `len` numbers of a list.
    fn view(&self, list: List, len: usize) -> Result<Tensor> {
        self.on_device.narrow(0, self.places[&list].0, len)
    }

    /// Token ids `[rows]`.
    pub(super) fn tokens(&self, rows: usize) -> Result<Tensor> {
        self.view(List::Tokens, rows)
    }

    /// The pages of the first `requests` requests.
    pub(super) fn pages(&self, requests: usize) -> Result<PageLists<'static>> {
        let width = self.limits.pages();
        let table = self.view(List::Pages, requests * width)?;
        Ok(PageLists::fixed(table.reshape((requests, width))?))
    }

    /// The first `n` rows, of `requests` requests.
    pub(super) fn rows(&self, n: usize, requests: usize) -> Result<Rows> {
        let device_rows = DeviceRows {
            positions: self.view(List::Positions, n)?,
            requests: self.view(List::Requests, n)?,
            spans: self
                .view(List::Spans, requests * 4)?
                .reshape((requests, 4))?,
        };
        let rings = self.capacities.iter();
        let rings = rings.map(|&c| Ok((c, self.view(List::Ring(c), n)?)));
        let groups = self.ratios.iter().map(|&ratio| {
            let groups = DeviceGroups {
                entries: self.view(List::Groups(ratio), n * 2)?.reshape((n, 2))?,
                positions: self.view(List::GroupPositions(ratio), n)?,
                pool_rows: Some(self.view(List::PoolRows(ratio), n)?),
            };
            Ok((ratio, groups))
        });
        let fixed = FixedRows {
            kv_start: self.view(List::KvStart, requests)?,
            groups: groups.collect::<Result<_>>()?,
        };
        Ok(Rows::fixed(
            self.on_device.device(),
            (n, self.limits.tokens),
            device_rows,
            rings.collect::<Result<_>>()?,
            fixed,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut lists = StepLists::new(&config, limits, &device).unwrap();
        let rows = Rows::pack(&device, [(2, 129, 1), (0, 6, 3), (1, 8, 1)]);
        let pages: [&[u32]; 3] = [&[4, 9], &[7], &[1]];
        lists
            .write(&[5, 6, 7, 8, 9], &rows, &PageLists::new(pages))
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
        let groups = &fixed.fixed_lists().unwrap().groups[&2];
        // Position 129 closes entry 64, on the second page; 6 to 8 close entry 3.
        assert_eq!(&list(&groups.entries)[..6], [0, 64, 1, 3, none, none]);
        assert_eq!(&list(&groups.positions)[..3], [128, 6, 0]);
        let pool_rows = list(groups.pool_rows.as_ref().unwrap());
        assert_eq!(&pool_rows[..3], [9 * 64, 7 * 64 + 3, PAD_ROW]);
        lists.clear().unwrap();
        assert_eq!(list(&lists.tokens(8).unwrap()), [0; 8]);
    }
}
