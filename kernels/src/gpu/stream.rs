//! Streams, events, and the copies and fills that run on a stream.

use std::ptr::null_mut;

use cudarc::driver::sys;

use super::error::driver;
use super::{Device, DevicePtr, GpuError, Pinned, Pod};

/// Whose blocks the device starts first when several streams have work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    High,
    Default,
    Low,
}

/// Work in order. It does not wait for the legacy default stream.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: sys::CUstream,
}

// SAFETY: a stream may be used from any thread; the driver locks inside.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(device: &Device, priority: Priority) -> Result<Self, GpuError> {
        device.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        let mut raw = null_mut();
        // SAFETY: pointers are to locals.
        unsafe {
            driver("asking for priorities", sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
            let priority = match priority {
                Priority::High => greatest,
                Priority::Default => 0,
                Priority::Low => least,
            };
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            driver("making a stream", sys::cuStreamCreateWithPriority(&mut raw, flags, priority))?;
        }
        Ok(Self { device: device.clone(), raw })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Wait on the CPU for all work so far. An error of any of it comes out here.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        // SAFETY: the stream lives.
        driver("waiting for the stream", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Later work on this stream runs after what `event` was last recorded behind.
    pub fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        // SAFETY: both live.
        driver("waiting for an event", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Copy the first `bytes` of `from` to the device.
    ///
    /// # Safety
    /// `to` has room for `bytes`. `from` lives and is not written until the copy is done, and for as long
    /// as a graph that holds the copy is launched.
    ///
    /// # Panics
    /// If `from` is smaller.
    pub unsafe fn upload_async<T: Pod>(&self, to: DevicePtr, from: &Pinned<T>, bytes: usize) -> Result<(), GpuError> {
        assert!(bytes <= from.bytes(), "upload of {bytes} bytes out of {}", from.bytes());
        // SAFETY: the caller's.
        driver("uploading", unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast(), bytes, self.raw) })
    }

    /// Copy `bytes` from the device to the beginning of `to`.
    ///
    /// # Safety
    /// `from` holds `bytes`. `to` lives and is neither read nor written until the copy is done, and for as
    /// long as a graph that holds the copy is launched.
    ///
    /// # Panics
    /// If `to` is smaller.
    pub unsafe fn download_async<T: Pod>(
        &self,
        to: &mut Pinned<T>,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), GpuError> {
        assert!(bytes <= to.bytes(), "download of {bytes} bytes into {}", to.bytes());
        // SAFETY: the caller's.
        driver("downloading", unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0, bytes, self.raw) })
    }

    /// Copy `bytes` on the device.
    ///
    /// # Safety
    /// Both ranges are allocated and do not overlap.
    pub unsafe fn copy_async(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        driver("copying", unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, bytes, self.raw) })
    }

    /// Set `count` bytes to `value`.
    ///
    /// # Safety
    /// The range is allocated.
    pub unsafe fn fill_u8_async(&self, to: DevicePtr, value: u8, count: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        driver("filling", unsafe { sys::cuMemsetD8Async(to.0, value, count, self.raw) })
    }

    /// Set `count` words of 4 bytes to `value`.
    ///
    /// # Safety
    /// The range is allocated, and aligned to 4 bytes.
    pub unsafe fn fill_u32_async(&self, to: DevicePtr, value: u32, count: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        driver("filling", unsafe { sys::cuMemsetD32Async(to.0, value, count, self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        // SAFETY: made in `new`, destroyed once; work that is left still runs. A failure leaves nothing to do.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// A point in a stream, with its time.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: sys::CUevent,
}

// SAFETY: an event may be used from any thread; the driver locks inside.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        device.make_current()?;
        let mut raw = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: the pointer is to a local.
        driver("making an event", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Place it behind all work of `stream` so far.
    pub fn record(&self, stream: &Stream) -> Result<(), GpuError> {
        // SAFETY: both live.
        driver("recording an event", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }

    /// Wait on the CPU for the work that it was recorded behind.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        // SAFETY: the event lives.
        driver("waiting for an event", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Milliseconds from `start` to `end`, both recorded and reached; the clock ticks in about 0.5 µs.
    pub fn elapsed_ms(start: &Event, end: &Event) -> Result<f32, GpuError> {
        let mut ms = 0.0;
        // SAFETY: both live; the pointer is to a local.
        driver("reading the time", unsafe { sys::cuEventElapsedTime_v2(&mut ms, start.raw, end.raw) })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        // SAFETY: made in `new`, destroyed once. A failure leaves nothing to do.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}
