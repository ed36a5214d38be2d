//! Device addresses of candle tensors, held for the length of a launch.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Storage, Tensor, bail};

use crate::operands::{Arguments, Place};
use crate::{Error, Result};

/// Calls `body` with the device address of each argument's first element, in their order; 0 for an
/// argument without elements, which nobody may touch.
///
/// While it runs, the storage of every argument is locked: exclusively if some argument in it is
/// written, else shared. Each storage is locked once, and all in the order of their addresses, as
/// candle does it, so that no two threads wait for each other. Where cudarc tracks uses by events,
/// the stream waits for earlier uses before `body` runs, and uses are recorded after it.
pub(super) fn with_addresses(
    stream: &Arc<CudaStream>,
    arguments: &Arguments<'_>,
    body: &mut Body<'_>,
) -> Result<()> {
    let mut storages: Vec<Held<'_>> = Vec::new();
    for (index, argument) in arguments.list().iter().enumerate() {
        if argument.tensor.elem_count() == 0 {
            continue;
        }
        let place = Place::of(argument.tensor);
        let user = (index, place.bytes.start as u64);
        match storages
            .iter_mut()
            .find(|held| held.storage == place.storage)
        {
            Some(held) => {
                held.users.push(user);
                if argument.written && !held.written {
                    (held.tensor, held.written) = (argument.tensor, true);
                }
            }
            None => storages.push(Held {
                storage: place.storage,
                tensor: argument.tensor,
                written: argument.written,
                users: vec![user],
            }),
        }
    }
    storages.sort_unstable_by_key(|held| held.storage);
    let mut addresses = vec![0; arguments.list().len()];
    hold(&storages, stream, &mut addresses, body)
}

/// What is done with the addresses.
type Body<'b> = dyn FnMut(&[u64]) -> Result<()> + 'b;

/// A storage that one or more arguments lie in.
struct Held<'a> {
    /// Tells it from others.
    storage: usize,
    /// A tensor in it; one that is written, if there is one.
    tensor: &'a Tensor,
    written: bool,
    /// Index of each argument in it, and where the argument begins, in bytes.
    users: Vec<(usize, u64)>,
}

impl Held<'_> {
    fn place(&self, base: u64, addresses: &mut [u64]) {
        for (index, offset) in &self.users {
            addresses[*index] = base + offset;
        }
    }
}

/// Runs the expression with the slice of a storage, whatever its dtype.
macro_rules! with_slice {
    ($storage:expr, $slice:ident => $body:expr) => {
        match $storage {
            CudaStorageSlice::U8($slice)
            | CudaStorageSlice::F6E2M3($slice)
            | CudaStorageSlice::F6E3M2($slice)
            | CudaStorageSlice::F4($slice)
            | CudaStorageSlice::F8E8M0($slice) => $body,
            CudaStorageSlice::U32($slice) => $body,
            CudaStorageSlice::I16($slice) => $body,
            CudaStorageSlice::I32($slice) => $body,
            CudaStorageSlice::I64($slice) => $body,
            CudaStorageSlice::BF16($slice) => $body,
            CudaStorageSlice::F16($slice) => $body,
            CudaStorageSlice::F32($slice) => $body,
            CudaStorageSlice::F64($slice) => $body,
            CudaStorageSlice::F8E4M3($slice) => $body,
        }
    };
}

/// Locks the storages one inside the other, then runs the body.
fn hold<'a>(
    storages: &'a [Held<'a>],
    stream: &'a Arc<CudaStream>,
    addresses: &'a mut [u64],
    body: &'a mut Body<'a>,
) -> Result<()> {
    let Some((held, rest)) = storages.split_first() else {
        return body(addresses);
    };
    if held.written {
        let state = RefCell::new(State {
            addresses,
            body: Some(body),
            outcome: Ok(()),
        });
        let op = Exclusively {
            held,
            rest,
            stream,
            state,
        };
        held.tensor.inplace_op1(&op)?;
        return op.state.into_inner().outcome;
    }
    let (storage, _) = held.tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        let device = format!("{:?}", storage.device().location());
        return Err(Error::UnsupportedDevice { op: NAME, device });
    };
    with_slice!(&storage.slice, slice => {
        // The guard records the use when it is dropped, after the body.
        let (base, _use) = slice.device_ptr(stream);
        held.place(base, addresses);
        hold(rest, stream, addresses, body)
    })
}

/// For messages about what cannot be.
const NAME: &str = "lock-storages";

/// Locks one storage exclusively, which candle lends to in-place operations alone, and goes on with
/// the rest while it is locked.
struct Exclusively<'a> {
    held: &'a Held<'a>,
    rest: &'a [Held<'a>],
    stream: &'a Arc<CudaStream>,
    state: RefCell<State<'a>>,
}

struct State<'a> {
    addresses: &'a mut [u64],
    /// Taken by the one call there is.
    body: Option<&'a mut Body<'a>>,
    outcome: Result<()>,
}

impl InplaceOp1 for Exclusively<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        bail!("{NAME}: expected a CUDA tensor");
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        let mut state = self.state.borrow_mut();
        let State {
            addresses,
            body,
            outcome,
        } = &mut *state;
        let Some(body) = body.take() else {
            bail!("{NAME}: called twice");
        };
        with_slice!(&mut storage.slice, slice => {
            let (base, _use) = slice.device_ptr_mut(self.stream);
            self.held.place(base, addresses);
            *outcome = hold(self.rest, self.stream, addresses, body);
        });
        Ok(())
    }
}
