//! Device memory from one arena, and page-locked host memory.

use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};

use cudarc::driver::sys::{self, CUresult};

use super::error::driver;
use super::{Device, GpuError};

/// Alignment of what an arena gives out, in bytes.
pub const ALIGNMENT: usize = 256;

/// An address on the device. Using it is up to whoever enqueues work with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// One allocation that is given out piece by piece and freed as a whole.
#[derive(Debug)]
pub struct Arena {
    device: Device,
    base: DevicePtr,
    bump: Bump,
}

impl Arena {
    /// Take `bytes` of device memory, which are not cleared.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, GpuError> {
        device.make_current()?;
        let mut base = 0;
        // SAFETY: the pointer is to a local.
        match unsafe { sys::cuMemAlloc_v2(&mut base, bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(GpuError::OutOfMemory { wanted: bytes, free: device.memory()?.0 })
            }
            code => {
                driver("allocating the arena", code)?;
                Ok(Self { device: device.clone(), base: DevicePtr(base), bump: Bump { capacity: bytes, used: 0 } })
            }
        }
    }

    /// The next `bytes`, aligned to [`ALIGNMENT`].
    pub fn alloc(&mut self, bytes: usize) -> Result<DevicePtr, GpuError> {
        self.bump.alloc(bytes).map(|offset| self.base.offset(offset))
    }

    pub fn capacity(&self) -> usize {
        self.bump.capacity
    }

    /// Bytes given out, padding included.
    pub fn used(&self) -> usize {
        self.bump.used
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        // SAFETY: allocated in `new`, freed once. Freeing waits for the device's work. A failure (the
        // context is lost) leaves nothing to do.
        let _ = unsafe { sys::cuMemFree_v2(self.base.0) };
    }
}

/// Offsets into an arena.
#[derive(Debug)]
struct Bump {
    capacity: usize,
    used: usize,
}

impl Bump {
    fn alloc(&mut self, bytes: usize) -> Result<usize, GpuError> {
        let full = GpuError::ArenaFull { wanted: bytes, free: self.capacity - self.used, capacity: self.capacity };
        let start = self.used.next_multiple_of(ALIGNMENT);
        let end = start.checked_add(bytes).filter(|end| *end <= self.capacity).ok_or(full)?;
        self.used = end;
        Ok(start)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Numbers for which every bit pattern is a value.
pub trait Pod: sealed::Sealed + Copy + Send + Sync + 'static {}

macro_rules! pod {
    ($($t:ty),*) => { $(impl sealed::Sealed for $t {} impl Pod for $t {})* };
}
pod!(u8, u16, u32, u64, i32, f32);

/// Page-locked host memory: copies from and to it run beside the CPU.
#[derive(Debug)]
pub struct Pinned<T: Pod> {
    device: Device,
    data: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its memory, as a `Box<[T]>` does.
unsafe impl<T: Pod> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T: Pod> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// `len` zeros.
    pub fn new(device: &Device, len: usize) -> Result<Self, GpuError> {
        device.make_current()?;
        let mut data = null_mut();
        let bytes = len.saturating_mul(size_of::<T>());
        // SAFETY: the pointer is to a local. The driver refuses what it cannot give, 0 bytes too.
        driver("allocating page-locked memory", unsafe { sys::cuMemHostAlloc(&mut data, bytes, 0) })?;
        // SAFETY: a call that succeeds gives `len` values at a page's start, this process's alone; zero
        // bytes are a value.
        let data = unsafe {
            let data = NonNull::new_unchecked(data.cast::<T>());
            data.write_bytes(0, len);
            data
        };
        Ok(Self { device: device.clone(), data, len })
    }

    /// Size of the memory in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T: Pod> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values, set in `new`, live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Pod> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`, and borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Pod> Drop for Pinned<T> {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        // SAFETY: allocated in `new`, freed once. A failure leaves nothing to do.
        let _ = unsafe { sys::cuMemFreeHost(self.data.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_and_disjoint_up_to_the_last_byte() {
        let mut bump = Bump { capacity: 1024, used: 0 };
        assert_eq!(bump.alloc(1).unwrap(), 0);
        assert_eq!(bump.alloc(256).unwrap(), 256);
        assert_eq!(bump.alloc(0).unwrap(), 512);
        assert_eq!(bump.alloc(512).unwrap(), 512);
        assert_eq!(bump.used, 1024);
        assert_eq!(bump.alloc(0).unwrap(), 1024);
    }

    #[test]
    fn a_full_arena_gives_the_numbers_and_keeps_what_is_left() {
        let mut bump = Bump { capacity: 1000, used: 0 };
        bump.alloc(700).unwrap();
        let error = bump.alloc(300).unwrap_err();
        assert_eq!(
            error.to_string(),
            "arena: 300 bytes wanted, 300 of 1000 left; plan a larger arena",
            "padding takes the rest"
        );
        assert!(matches!(bump.alloc(usize::MAX).unwrap_err(), GpuError::ArenaFull { wanted: usize::MAX, .. }));
        assert_eq!(bump.alloc(232).unwrap(), 768);
    }

    #[test]
    fn an_offset_counts_bytes() {
        assert_eq!(DevicePtr(4096).offset(12), DevicePtr(4108));
    }
}
