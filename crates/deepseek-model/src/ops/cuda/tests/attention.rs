//! Attention, on caches that hold NaN wherever no row may read.

use candle_core::{DType, Device, Tensor};
use replay_core::{Position, Window};

use super::{
    super::attention::attend, ACTS, Draw, Sparse, assert_close, gpu, on, plain, small, values,
};
use crate::{
    cache::{PageLists, PagedRows, RowRing},
    ops::{Act, Choice, EntryKeys, KvStart, RopeFrequencies, WindowKeys, attention},
    rows::{DeviceRows, Rows},
};

mod split;

/// One request: its rows that enter the layer, of which the last `running` go through it.
struct Request {
    slot: usize,
    first_pos: usize,
    entering: usize,
    running: usize,
    kv_start: u32,
}

const SLOTS: usize = 6;

/// From slots, first positions, entering and running rows, and bounds.
fn requests(of: &[(usize, usize, usize, usize, u32)]) -> Vec<Request> {
    let request = |&(slot, first_pos, entering, running, kv_start): &_| Request {
        slot,
        first_pos,
        entering,
        running,
        kv_start,
    };
    of.iter().map(request).collect()
}

/// Sizes of a case.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    dim: usize,
    window: usize,
    /// Entries chosen at most; 0: the layer has none.
    width: usize,
    per_page: usize,
    /// Rows of the first chunk.
    longest: usize,
}

/// What is the same on both devices.
struct Scene {
    shape: Shape,
    act: Act,
    requests: Vec<Request>,
    q: Tensor,
    sink: Tensor,
    current: Tensor,
    ring: Tensor,
    pool: Tensor,
    choice: Tensor,
    pages: Vec<Vec<u32>>,
}

impl Scene {
    /// A first chunk, a later one, decode, one that was trimmed within the running rows, and one of
    /// which no row goes on.
    fn new(shape: Shape, act: Act, draw: &mut Draw) -> Self {
        let mixed = [
            (2, 0, shape.longest, shape.longest, 0),
            (0, 37, 9, 4, 0),
            (3, 100, 1, 1, 0),
            (1, 50, 20, 6, 66),
            (4, 7, 3, 0, 0),
        ];
        Self::of(shape, act, requests(&mixed), draw)
    }

    fn of(shape: Shape, act: Act, requests: Vec<Request>, draw: &mut Draw) -> Self {
        let entering = rows(&Device::Cpu, &requests, |r| r.entering);
        let running = rows(&Device::Cpu, &requests, |r| r.running);
        let mut current = Sparse::new(entering.len(), shape.dim);
        let mut ring = Sparse::new(SLOTS * shape.window, shape.dim);
        for row in 0..running.len() {
            let (request, pos) = running.locate(row);
            let (span, start) = (entering.spans()[request], requests[request].kv_start);
            let seen = window(shape).keys(Position::new(pos as u32), Position::new(start));
            for pos in seen.start as usize..seen.end as usize {
                if pos >= span.first_pos {
                    let row = span.first_row + pos - span.first_pos;
                    current.draw(row, || draw.value(act));
                } else {
                    let row = span.slot * shape.window + pos % shape.window;
                    ring.draw(row, || draw.value(act));
                }
            }
        }
        let (pages, choice, pool) = entries(shape, act, &requests, &running, draw);
        Self {
            shape,
            act,
            q: (draw.values(&[running.len(), shape.heads * shape.dim], act) * 2.0).unwrap(),
            sink: draw.values(&[shape.heads], Act::F32),
            current: current.tensor(),
            ring: ring.tensor(),
            pool,
            choice,
            pages,
            requests,
        }
    }

    /// Calls `body` with the operands on a device, CPU or GPU.
    fn on<R>(&self, device: &Device, body: impl FnOnce(&Operands<'_>) -> R) -> R {
        let (shape, cpu) = (self.shape, device.is_cpu());
        let place = |tensor: &Tensor| {
            if cpu {
                tensor.clone()
            } else {
                on(device, self.act, tensor)
            }
        };
        let held = if cpu { DType::F32 } else { self.act.dtype() };
        let ring = RowRing::new(SLOTS, shape.window, shape.dim, (held, device)).unwrap();
        ring.data().slice_set(&place(&self.ring), 0, 0).unwrap();
        let n_pages = self.pages.iter().map(Vec::len).sum::<usize>() + 1;
        let pool = PagedRows::new(n_pages, shape.per_page, shape.dim, (held, device)).unwrap();
        pool.data().slice_set(&place(&self.pool), 0, 0).unwrap();
        let pages = PageLists::new(self.pages.iter().map(Vec::as_slice));
        let choice = Choice {
            entries: plain(device, &self.choice),
            width: shape.width.max(1),
        };
        let kv_start: Vec<u32> = self.requests.iter().map(|r| r.kv_start).collect();
        body(&Operands {
            q: place(&self.q),
            sink: plain(device, &self.sink),
            running: rows(device, &self.requests, |r| r.running),
            window: WindowKeys {
                current: &place(&self.current),
                entering: &rows(device, &self.requests, |r| r.entering),
                ring: &ring,
                window: window(shape),
                kv_start: KvStart::Host(&kv_start),
            },
            entries: (shape.width > 0).then_some(EntryKeys {
                choice: &choice,
                pool: &pool,
                pages: &pages,
            }),
        })
    }

    /// The whole operation.
    fn run(&self, device: &Device) -> Tensor {
        self.on(device, |operands| {
            let frequencies = RopeFrequencies::of(vec![1.0, 0.01], device).unwrap();
            let rows = &operands.running;
            let positions = (0..rows.len()).map(|row| rows.locate(row).1 as u32);
            attention(
                &operands.q,
                rows,
                &operands.window,
                operands.entries.as_ref(),
                &operands.sink,
                &frequencies.table(positions).unwrap(),
                self.act,
            )
            .unwrap()
        })
    }
}

/// The operands on a device.
struct Operands<'a> {
    q: Tensor,
    sink: Tensor,
    running: Rows,
    window: WindowKeys<'a>,
    entries: Option<EntryKeys<'a>>,
}

fn window(shape: Shape) -> Window {
    Window::new(shape.window as u32).unwrap()
}

/// The last `count` entering rows of each request.
fn rows(device: &Device, requests: &[Request], count: impl Fn(&Request) -> usize) -> Rows {
    let spans = requests.iter().map(|r| {
        let n = count(r);
        (r.slot, r.first_pos + r.entering - n, n)
    });
    Rows::pack(device, spans)
}

/// Page lists, the choice of each row (0 to `width` entries), and the pool.
fn entries(
    shape: Shape,
    act: Act,
    requests: &[Request],
    running: &Rows,
    draw: &mut Draw,
) -> (Vec<Vec<u32>>, Tensor, Tensor) {
    let width = shape.width.max(1);
    let all = 3 * width;
    let per_request = all.div_ceil(shape.per_page);
    // One page is of nobody.
    let n_pages = requests.len() * per_request + 1;
    let order = draw.shuffled(n_pages);
    let pages: Vec<Vec<u32>> = order.chunks_exact(per_request).map(Vec::from).collect();
    let pages = pages[..requests.len()].to_vec();
    let mut pool = Sparse::new(n_pages * shape.per_page, shape.dim);
    let mut choice = Vec::new();
    for row in 0..running.len() {
        let list = &pages[running.locate(row).0];
        // All, none, any number.
        let n = match row % 4 {
            0 => shape.width,
            1 => 0,
            _ => draw.below(shape.width + 1),
        };
        let mut chosen = draw.shuffled(all)[..n].to_vec();
        chosen.sort_unstable();
        for entry in &chosen {
            let entry = *entry as usize;
            let page = list[entry / shape.per_page] as usize;
            let row = page * shape.per_page + entry % shape.per_page;
            pool.draw(row, || draw.value(act));
        }
        chosen.resize(width, Choice::NONE);
        choice.extend(chosen);
    }
    let choice = Tensor::from_vec(choice, (running.len(), width), &Device::Cpu).unwrap();
    (pages, choice, pool.tensor())
}

/// One head and many, heads that fill no group, channels that fill no warp, windows and choices that
/// fill no tile; few rows and many, which take different kernels.
fn shapes() -> Vec<Shape> {
    let shape = |(heads, dim, window, width, per_page, longest)| Shape {
        heads,
        dim,
        window,
        width,
        per_page,
        longest,
    };
    let mut shapes = vec![
        (1, 8, 8, 0, 1, 11),
        (3, 36, 8, 5, 4, 11),
        (5, 64, 33, 40, 16, 50),
        (17, 300, 16, 24, 8, 3),
        (20, 40, 24, 9, 4, if small() { 140 } else { 300 }),
        (33, 512, 20, 9, 4, 100),
    ];
    if !small() {
        shapes.extend([
            (64, 512, 128, 512, 64, 8),
            (64, 512, 128, 512, 64, 90),
            // In bf16 on tensor cores, as the one before; heads that fill no block, or more than one.
            (40, 512, 50, 70, 16, 130),
            (100, 512, 8, 0, 16, 60),
        ]);
    }
    shapes.into_iter().map(shape).collect()
}

#[test]
fn gpu_attention_reads_what_each_row_may() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for shape in shapes() {
            let scene = Scene::new(shape, act, &mut draw);
            let (got, expected) = (scene.run(&device), scene.run(&Device::Cpu));
            // The sums over hundreds of keys run in another order.
            assert_close("attention", &got, &expected, tolerance.max(1e-5));
        }
    }
}

/// A strong and a weak sink, as they occur in released weights and beyond.
#[test]
fn gpu_attention_with_sinks_of_any_size() {
    let (device, mut draw) = (gpu(), Draw::new());
    let shape = shapes()[1];
    for sink in [-1e4f32, -30.0, 30.0, 1e4] {
        let mut scene = Scene::new(shape, Act::F32, &mut draw);
        scene.sink = Tensor::full(sink, shape.heads, &Device::Cpu).unwrap();
        let (got, expected) = (scene.run(&device), scene.run(&Device::Cpu));
        assert_close("attention", &got, &expected, 1e-5);
    }
}

/// Pad rows of a graph are zero whatever their positions and choices say, and the others do not
/// depend on how many rows there are: few and many take different kernels.
#[test]
fn gpu_attention_of_a_row_depends_on_no_other() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        let scene = Scene::new(shapes()[2], act, &mut draw);
        scene.on(&device, |operands| {
            let (rows, entries) = (operands.running.on_device().unwrap(), &operands.entries);
            let entries = entries.as_ref().unwrap();
            let attend = |q: &Tensor, rows: &DeviceRows, choice: &Tensor| {
                let choice = Choice {
                    entries: choice.clone(),
                    width: entries.choice.width,
                };
                let entries = EntryKeys {
                    choice: &choice,
                    ..*entries
                };
                let out = attend(q, rows, &operands.window, Some(&entries), &operands.sink);
                values(&out.unwrap())
            };
            let (q, choice) = (&operands.q, &entries.choice.entries);
            let alone = attend(q, rows, choice);
            let pads = Tensor::full(Choice::NONE, 2, &device).unwrap();
            let cat = |a: &Tensor, b: &Tensor| Tensor::cat(&[a, b], 0).unwrap();
            let padded = DeviceRows {
                positions: cat(&rows.positions, &pads),
                requests: cat(&rows.requests, &pads),
                spans: rows.spans.clone(),
            };
            let more = (q.narrow(0, 0, 2).unwrap(), choice.narrow(0, 0, 2).unwrap());
            let out = attend(&cat(q, &more.0), &padded, &cat(choice, &more.1));
            assert_eq!(out[..alone.len()], alone);
            assert!(out[alone.len()..].iter().all(|x| *x == 0.0));

            let repeat = |tensor: &Tensor| Tensor::cat(&[tensor; 8], 0).unwrap();
            let repeated = DeviceRows {
                positions: repeat(&rows.positions),
                requests: repeat(&rows.requests),
                spans: rows.spans.clone(),
            };
            let out = attend(&repeat(q), &repeated, &repeat(choice));
            assert!(out.chunks_exact(alone.len()).all(|part| part == alone));
        });
    }
}
